"""The committed goldens: complete, small, and every scheme of the matrix as the plain references computed it once."""

import pytest
import torch
from golden_cases import CASES
from golden_cases import ids
from golden_cases import model_of
from golden_cases import outputs_of
from golden_cases import reference_weights
from golden_reader import COMMITTED
from golden_reader import NAMES
from golden_reader import cases_of
from golden_reader import golden
from matrix import Case

REMEDY = "python tests/goldens/make.py plain_references"


def test_nothing_is_absent() -> None:
    """Tests read all committed folders, and a clone has them all: together no more than 1.5 MB."""
    assert {path.name for path in COMMITTED.iterdir() if path.is_dir() and path.name[0] != "_"} == {*NAMES}
    assert all(cases_of(COMMITTED / name) for name in NAMES)
    assert sum(path.stat().st_size for path in COMMITTED.rglob("*") if path.is_file()) < 1_500_000


def test_a_committed_folder_never_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Where one is absent its tests fail, and only those of folders beside the repository skip."""
    for root in ("COMMITTED", "BESIDE"):
        monkeypatch.setattr(f"golden_reader.{root}", tmp_path)
    for name in NAMES:
        with pytest.raises(AssertionError, match=f"tests/goldens/{name} is absent or lacks '': .*make.py makes it"):
            golden(name)
    with pytest.raises(pytest.skip.Exception, match="the goldens of kerple are absent"):
        golden("kerple")


def test_every_row_has_its_golden() -> None:
    assert {*cases_of(COMMITTED / "plain_references")} == {*CASES}, REMEDY


@pytest.mark.parametrize("name, case", CASES.items(), ids=CASES)
def test_as_the_plain_reference_computed(name: str, case: Case) -> None:
    """Hidden states and the gradient of the embeddings, from weights that the golden holds by the model's own names."""
    reader, model = golden("plain_references"), model_of(case)
    weights = {key: weight for key, weight in reader.weights(name).items() if key in reference_weights(case)}
    assert weights.keys() == dict(model.named_parameters()).keys(), REMEDY
    weights = {key: weight.requires_grad_() for key, weight in weights.items()}
    found = outputs_of(weights, torch.func.functional_call(model, weights, (ids(),)).last_hidden_state)
    wanted = reader.outputs(name)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10)
