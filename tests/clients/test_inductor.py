"""`torch.compile` with inductor, which builds programs for the machine: every scheme in one graph, as exact as without it.

Everything is computed in float32, plain and compiled, and plain in float64 as the reference. A compiler may add in another order,
so the two in float32 differ; what is asked is that the compiled one is at most `FACTOR` times as far from the reference as the plain
one is. Far is the length of the difference divided by that of the reference, over all logits or all gradients together. Llama and
T5 round to float32 inside of float64 models too, so a fixed tolerance for float64 would not do for them.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from client_models import BERT
from client_models import HEADS
from client_models import LLAMA
from client_models import SEQ2SEQS_AND_T5
from client_models import Kind
from client_models import asks_of
from client_models import ours
from client_models import params
from matrix import ids_of
from test_onnx import SCHEMES
from torch._dynamo.utils import counters
from transformers import CompileConfig

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
asks = asks_of("torch.compile, inductor", package="torch")
FACTOR = 4
ROUNDING = 2 * torch.finfo(torch.float32).eps  # so much is no error, where the plain result happens to be exact


def kinds_of(family: str) -> list[Kind]:
    """Return a kind of every scheme of a family, with the parameters of its first variant."""
    fields = {
        scheme: {"position_scheme": scheme, "position_parameters": given} for kind, scheme, given in SCHEMES if kind == family
    }
    return list(ours(family.capitalize(), fields).values())


DECODERS = params(*kinds_of("decoder"), LLAMA)
ENCODERS = params(*kinds_of("encoder"), BERT)


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take no program from an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return how far tensors are from a reference in float64, relative to it, all of them together."""
    one, other = (torch.cat([value.detach().double().flatten() for value in values]) for values in (found, wanted))
    return float((one - other).norm() / other.norm())


def as_exact(compiled: list[torch.Tensor], plain: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Raise unless compiled results are about as near to the reference as plain ones."""
    bound = FACTOR * distance(plain, wanted) + ROUNDING
    assert bound < 1e-4, "the plain result is far from the reference itself"
    assert distance(compiled, wanted) <= bound


@asks("forward and training step, padded, in one graph")
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS, *SEQ2SEQS_AND_T5])
def test_training_step(kind: Kind) -> None:
    """Logits, loss and all gradients."""
    model, ids = kind.model(dtype=torch.float32), ids_of()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {} if kind.head == HEADS["Encoder"] else {"use_cache": False}
    found = []
    for one, runner in (
        (copy.deepcopy(model).double(),) * 2,
        (model, model),
        (model, torch.compile(model, fullgraph=True)),
    ):
        output = runner(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **options)
        gradients = torch.autograd.grad(output.loss, list(one.parameters()), allow_unused=True)
        found.append(([output.loss, output.logits[mask.bool()]], [grad for grad in gradients if grad is not None]))
    for wanted, plain, compiled in zip(*found, strict=True):
        as_exact(compiled, plain, wanted)


@asks("decoding with a static cache, padded, each step in one graph")
@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_decoding_steps(kind: Kind) -> None:
    """The logits of every step of `generate`, which compiles the step."""
    model, ids = kind.model(dtype=torch.float32), ids_of()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    compile_config: Any = CompileConfig(fullgraph=True, mode="default")
    compile_config._compile_all_devices = True
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    wanted = copy.deepcopy(model).double().generate(ids, disable_compile=True, **options)
    plain = model.generate(ids, disable_compile=True, **options)
    compiled = model.generate(ids, compile_config=compile_config, **options)
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    assert compiled.sequences.tolist() == plain.sequences.tolist() == wanted.sequences.tolist()
    as_exact(list(compiled.logits), list(plain.logits), list(wanted.logits))
