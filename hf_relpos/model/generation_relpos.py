"""Generation and segment memory: reading a text of any length, and generating from what is remembered of it.

A memory holds hidden states, a key/value cache holds their projections: a memory can become a cache, but not the other
way round. So generation begins from a memory, and what was generated is read into it afterwards:

    memory = model.read(long_text)
    reply = model.generate(question, memory=memory)
    memory = model.read(reply, memory)
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin

from .forward_keywords import refuse_replaced
from .position_builder import build_positions
from .segment_memory import SegmentMemory
from .segment_memory import check_memory
from .segment_memory import rows_of


def _check_ids(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, least: int = 0) -> None:
    """Refuse, by a ValueError, what is no batch of token ids, of `least` tokens at least, with a mask of the same shape."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.shape[1] < least:
        given = (
            f"shape {tuple(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else f"type {type(input_ids).__name__}"
        )
        tokens = f", at least {least} token a row" if least else ""
        raise ValueError(f"input_ids of {given} are refused: expected a tensor of shape (batch, sequence){tokens}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, expected {tuple(input_ids.shape)}: that of input_ids, "
            "without what is remembered"
        )


class PaddedGenerationMixin(GenerationMixin):
    """transformers' generation of padded batches. Continuous batching is refused where it begins, not in its thread."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching, which `generate_batch` and `cache_implementation="paged"` ask for too.

        Its attention functions take keys from pages and a mask, and have no place for what schemes add to scores; nor does it hand
        the model the position of each key, which distances are made of.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "continuous batching (generate_batch, cache_implementation='paged') is refused: its pages of keys come without the "
            "positions that score terms are computed from; use model.generate(input_ids, attention_mask=...) with a padded batch"
        )


class MemoryGenerationMixin(PaddedGenerationMixin):
    """transformers' generation for a language model whose base model, `self.model`, has segment memory.

    With `sliding_window = mem_len + 1` (the default) every way of cutting the text into memory, prompt and generated
    tokens gives what one pass over all of it gives. With `sliding_window=None`, the original Transformer-XL, the
    generated tokens belong to the segment of the prompt: they see all of the memory and all of that segment.
    """

    config: Any
    model: Any
    dtype: Any
    device: Any

    def set_memory_length(self, mem_len: int, sliding_window: int | None | str = "auto") -> None:
        """Use another memory length from now on, for instance a longer one than in training.

        Args:
            mem_len: tokens of segment memory; 0 turns it off. `memory.resize(mem_len)` fits a memory made before.
            sliding_window: keys that a query sees, itself included; `mem_len + 1` by default.
        """
        changes = {"mem_len": mem_len, "sliding_window": sliding_window}
        changed = type(self.config).from_dict(self.config.to_dict() | changes)
        for name in ("mem_len", "sliding_window", "layer_types"):
            setattr(self.config, name, getattr(changed, name))

    def _validate_generated_length(self, generation_config: Any, input_ids_length: int, has_default_max_length: bool) -> None:
        """Refuse, before a token is generated, a length that learned positions cannot reach."""
        # The library types `self` as a finished model, which a mixin is not.
        check: Any = super()._validate_generated_length  # pyright: ignore[reportAttributeAccessIssue]
        check(generation_config, input_ids_length, has_default_max_length)
        bounded = next((scheme for scheme in self.model.schemes_of_layers() if scheme.bounded), None)
        if bounded is not None and not has_default_max_length and generation_config.max_length - 1 > bounded.bound:
            raise ValueError(
                f"{input_ids_length} tokens are to grow to {generation_config.max_length}, but {bounded.name} is bounded by "
                f"max_position_embeddings={bounded.bound}: ask for fewer new tokens or choose a relative scheme"
            )

    def _get_static_cache_init_shape(self) -> Any:
        """Return None, so that the first keys shape a static cache, where gates are kept with them: keys are wider than values then."""
        if any(scheme.gates() for scheme in self.model.schemes_of_layers()):
            return None
        shape: Any = super()._get_static_cache_init_shape  # pyright: ignore[reportAttributeAccessIssue]
        return shape()

    def empty_memory(self, batch_size: int) -> SegmentMemory:
        """Return the memory of rows that have read nothing."""
        self._needs_memory("empty_memory")
        shape = (batch_size, self.config.num_hidden_layers, self.config.mem_len, self.config.hidden_size)
        hidden = self.model.embed_example().new_zeros(shape)
        return SegmentMemory(hidden, torch.zeros(batch_size, dtype=torch.long, device=hidden.device))

    @torch.no_grad()
    def read(
        self,
        input_ids: torch.Tensor,
        memory: SegmentMemory | None = None,
        attention_mask: torch.Tensor | None = None,
        segment_len: int = 512,
    ) -> SegmentMemory:
        """Read a text of any length segment by segment, in the memory that one segment takes.

        Args:
            input_ids: `(batch, sequence)` tokens, none at all included.
            memory: what was read before.
            attention_mask: `(batch, sequence)` 0 for padding, wherever it stands.
            segment_len: tokens of a segment; it changes nothing as long as `sliding_window` is at most `mem_len + 1`.

        Returns:
            The memory after the last token.
        """
        self._needs_memory("read")
        if segment_len < 1:
            raise ValueError(f"segment_len={segment_len} must be at least 1")
        _check_ids(input_ids, attention_mask)
        remembered = memory or self.empty_memory(input_ids.shape[0])
        for start in range(0, input_ids.shape[1], segment_len):
            part = slice(start, start + segment_len)
            mask = None if attention_mask is None else attention_mask[:, part]
            remembered = self.model(input_ids=input_ids[:, part], attention_mask=mask, memory=remembered).memory
        return remembered

    @torch.no_grad()
    def memory_to_cache(self, memory: SegmentMemory) -> tuple[DynamicCache, torch.Tensor]:
        """Project a memory into the key/value cache that generation goes on with.

        Give `generate` or `forward` the new tokens only, the cache, and an attention mask over the remembered and the
        new tokens: the mask returned here, joined with that of the new tokens. `generate(memory=...)` does all that.

        Returns:
            The cache, and `(batch, remembered)` 1 for tokens and 0 where a row remembers less than the longest.
        """
        self._needs_memory("memory_to_cache")
        config, batch = self.config, rows_of(memory)
        like = self.model.embed_example().new_empty(1, 1, config.hidden_size)
        memory = check_memory(memory, batch, config.num_hidden_layers, config.mem_len, like)
        tokens = int(memory.length.max())
        mask = (torch.arange(tokens, device=memory.length.device) >= tokens - memory.length[:, None]).long()
        cache = DynamicCache(config=config)
        if tokens:
            positions = build_positions((batch, tokens), like, causal=True, attention_mask=mask)
            for index, (layer, owner) in enumerate(zip(self.model.layers, self.model.schemes_of_layers(), strict=True)):
                scheme = owner.call
                context = layer.context(None, memory.hidden[:, index, memory.slots - tokens :])
                layer.attention.extend(context, scheme, scheme("prepare", positions), cache)
        return cache, mask

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *args: Any,
        memory: SegmentMemory | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does, from a memory if there is one.

        Args:
            inputs: `(batch, sequence)` the tokens that follow the remembered ones, at least one.
            memory: what was read before; its rows are those of `inputs`.
            attention_mask: `(batch, sequence)` of `inputs` alone. Padding is refused: it would stand between what was
                read and what follows, and take room in the cache. Prompts of unequal lengths are read up to their last
                token, `memory = model.read(inputs[:, :-1], memory, attention_mask[:, :-1])`, to go on from
                `inputs[:, -1:]`.
        """
        refuse_replaced("generate", kwargs)
        if memory is None:
            return super().generate(inputs, generation_config, *args, **kwargs)  # pyright: ignore
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        beside = [name for name in ("cache", "past_key_values", "cache_implementation") if kwargs.get(name) is not None]
        if ids is None or beside:
            wrong = f"got {', '.join(beside)}" if beside else "got no input_ids"
            raise ValueError(f"generation from a memory takes input_ids, and no cache beside the memory: {wrong}")
        _check_ids(ids, kwargs.get("attention_mask"), least=1)
        if ids.shape[0] != rows_of(memory):
            raise ValueError(f"the memory has {rows_of(memory)} rows, input_ids have {ids.shape[0]}")
        if kwargs.get("reset_mask") is not None:
            raise ValueError("reset_mask is refused by generate: memory.reset(rows) forgets what rows have read")
        if kwargs.get("position_ids") is not None:
            raise ValueError(
                "position_ids are refused beside a memory, which holds no numbers to go on from: tokens are counted"
            )
        if kwargs.pop("use_cache", True) is False:
            raise ValueError("use_cache=False with memory: generation goes on from the memory through a cache")
        mask = kwargs.pop("attention_mask", None)
        mask = torch.ones_like(ids) if mask is None else mask
        if not bool(mask.all()):
            raise ValueError("padding between a memory and a prompt: read inputs[:, :-1], go on from inputs[:, -1:]")
        cache, remembered = self.memory_to_cache(memory)
        settings = (kwargs, vars(generation_config or self.generation_config), vars(self.generation_config))
        names = ("num_beams", "num_return_sequences")
        copies = max(next((given[name] for given in settings if given.get(name)), 1) for name in names)
        if copies > 1:
            cache.batch_repeat_interleave(copies)
        kwargs |= {"cache": cache, "attention_mask": torch.cat([remembered.to(mask), mask], 1), "use_cache": True}
        return super().generate(ids, generation_config, *args, **kwargs)  # pyright: ignore

    def _needs_memory(self, method: str) -> None:
        if self.config.mem_len == 0:
            raise ValueError(f"{method} needs a model with segment memory: mem_len=0; see set_memory_length")
