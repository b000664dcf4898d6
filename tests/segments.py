"""Tiny documents, models and trainers for the tests of segment memory."""

import torch
from datasets import Dataset
from transformers import TrainingArguments

from hf_relpos import SCHEMES
from hf_relpos import RelPosDecoderConfig
from hf_relpos import RelPosDecoderForCausalLM
from hf_relpos.data.packing import cut_blocks
from hf_relpos.training.segment_trainer import SegmentTrainer

VOCABULARY, END = 37, 36
MEMORY_SCHEMES = [name for name, scheme in SCHEMES.items() if not {"causal", "memory"} & scheme.refuses.keys()] + ["rope+t5"]


def make_documents(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(END, (length,), generator=generator).tolist() for length in lengths]


def make_table(documents, block_size=8, padding=None):
    return Dataset.from_dict(cut_blocks(documents, block_size, END, padding)).with_format("torch")


def make_config(scheme="transformer_xl", **fields):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return RelPosDecoderConfig(**sizes | {"position_scheme": scheme, "mem_len": 6, "initializer_range": 0.3} | fields)


def make_model(scheme="transformer_xl", dtype=torch.float32, **fields):
    torch.manual_seed(0)
    return RelPosDecoderForCausalLM(make_config(scheme, **fields)).to(dtype).eval()


def make_arguments(folder, **fields):
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "log_level": "error"}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-2}
    return TrainingArguments(output_dir=str(folder), **quiet | sizes | {"logging_steps": 1} | fields)


class WatchedTrainer(SegmentTrainer):
    """Remembers what its training batches held, and what they cost as hexadecimal numbers."""

    def __init__(self, *args, **kwargs):
        self.ids, self.costs = [], []
        super().__init__(*args, **kwargs)

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.ids.append(inputs["input_ids"].tolist())
        self.costs.append(loss.item().hex())
        return loss


def make_trainer(folder, train=None, evaluation=None, model=None, trainer=WatchedTrainer, options=None, **fields):
    model = make_model() if model is None else model
    arguments = make_arguments(folder, **fields)
    return trainer(model=model, args=arguments, train_dataset=train, eval_dataset=evaluation, **options or {})


def logged(trainer, name="loss"):
    """What a trainer logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@torch.no_grad()
def reference(model, documents):
    """Mean loss and number of targets when each document is one full forward pass."""
    total, tokens = 0.0, 0
    for document in documents:
        ids, targets = torch.tensor([document]), torch.tensor([[*document[1:], END]])
        logits = model(input_ids=ids, use_cache=False).logits.double()
        total += torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum").item()
        tokens += len(document)
    return total / tokens, tokens
