"""Ways to break the package, by name: each replaces one piece of one file, and the tests of that file have to notice.

A piece must stand once in its file; a test of the default run checks that, so that a mutant never goes stale unnoticed.
"""

from typing import NamedTuple

TESTS: dict[str, tuple[str, ...]] = {
    "model/positions.py": ("matrix", "memory", "padding", "position_ids", "blockwise", "decoding", "packed_rows", "schemes"),
    "model/position_builder.py": ("padding", "position_ids", "memory", "decoding", "seq2seq", "permutation", "packed_rows"),
    "model/position_documents.py": ("packed_rows", "padding", "memory", "matrix"),
    "model/position_ids_cache.py": ("position_ids", "decoding"),
    "model/position_tables.py": ("tables", "decoding", "matrix", "blockwise"),
    "model/position_two_stream.py": ("permutation", "goldens_committed", "permutation_training"),
    "model/toeplitz.py": ("toeplitz", "matrix", "blockwise"),
    "model/segment_memory.py": ("memory", "memory_generation", "encoder_memory", "segment_trainer"),
    "model/sliding_cache.py": ("decoding", "padding"),
    "model/scheme_absolute.py": ("matrix", "schemes", "parity"),
    "model/scheme_base.py": ("matrix", "schemes", "config"),
    "model/scheme_bias.py": ("matrix", "schemes", "parity", "parity_schemes", "parity_encoder", "gates"),
    "model/scheme_combined.py": ("combined", "matrix"),
    "model/scheme_deberta.py": ("matrix", "schemes", "parity_encoder", "decoding", "gates"),
    "model/scheme_dense.py": ("matrix", "schemes", "parity_schemes", "decoding", "gates"),
    "model/scheme_gates.py": ("gates", "matrix", "parity_schemes"),
    "model/running_sums.py": ("gates", "matrix", "decoding"),
    "model/scheme_terms.py": ("matrix", "blockwise", "decoding"),
    "model/scheme_vectors.py": ("matrix", "schemes", "parity_xlnet", "parity_schemes", "gates"),
    "model/scheme_rotary.py": ("matrix", "schemes", "parity", "gates"),
    "model/attention.py": ("matrix", "decoding", "backends", "gates"),
    "model/attention_backends.py": ("backends", "matrix", "heads", "precision", "gates"),
    "model/transformer_layer.py": ("matrix", "memory", "parity", "heads", "parity_encoder"),
    "model/transformer_stack.py": ("matrix", "heads", "parity", "config", "gates", "parity_encoder"),
    "model/modeling_relpos.py": ("heads", "memory", "encoder_memory", "decoding", "segment_trainer"),
    "model/blockwise_attention.py": ("blockwise", "backends", "block_training", "precision"),
    "model/blockwise_backward.py": ("blockwise", "block_training", "matrix", "gates", "precision"),
    "model/blockwise_forward.py": ("blockwise", "block_training", "gates"),
    "model/blockwise_key_terms.py": ("blockwise", "toeplitz"),
    "model/blockwise_masking.py": ("blockwise_masking", "blockwise"),
    "model/blockwise_sums.py": ("gates", "blockwise", "backends", "matrix"),
    "model/head_losses.py": ("heads", "seams", "segment_trainer"),
    "model/adaptive_softmax.py": ("adaptive", "convert_transfo_xl"),
    "model/weight_loading.py": ("old_folders", "changed_schemes", "saving"),
    "model/generation_relpos.py": ("memory_generation", "generate", "decoding"),
    "model/configuration_relpos.py": ("config", "saving", "old_folders"),
    "model/configuration_changes.py": ("config", "changed_schemes"),
    "data/lanes.py": ("lanes", "segment_trainer"),
    "data/packing.py": ("data", "lanes"),
    "data/tokenizing.py": ("data", "tokenization", "reading"),
    "data/streams.py": ("lanes", "stream_evaluation", "segment_trainer"),
    "data/stream_lanes.py": ("stream_lanes",),
    "data/hold_out.py": ("data",),
    "data/tokenizers.py": ("tokenization", "data"),
    "data/tables.py": ("tables", "reading", "data"),
    "training/segment_trainer.py": ("segment_trainer", "resume", "stream_lanes"),
    "training/segment_checkpoint.py": ("resume", "stream_lanes"),
    "training/checked_trainer.py": ("checked_trainer", "seams"),
    "training/optimizer.py": ("optimization",),
    "training/checkpoints.py": ("checked_trainer", "resume"),
    "training/folder_lock.py": ("run_folder",),
}
"""By file of the package, the names of the tests that are asked, in this order, without `test_` and `.py`."""


class Mutant(NamedTuple):
    """One way to break the package.

    Attributes:
        name: what is broken.
        file: under `hf_relpos`.
        old: what stands there, once.
        new: what takes its place.
        tests: names of tests that are asked before those of the file.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


MUTANTS = [
    # Who stands where, and who sees whom.
    Mutant("distance has the other sign", "model/positions.py", "query[:, None])[None]", "query[:, None]).neg()[None]"),
    Mutant("a query sees the next key", "model/positions.py", "seen = offset <= 0 if", "seen = offset <= 1 if"),
    Mutant("the window shows one key more", "model/positions.py", "abs() < self.window)", "abs() <= self.window)"),
    Mutant("padding is seen", "model/positions.py", "seen = seen & self.key_valid[:, None, :]", "seen = seen & True"),
    Mutant(
        "documents see each other",
        "model/positions.py",
        "(self.query_document[:, :, None] == self.key_document[:, None, :])",
        "(self.query_document[:, :, None] >= self.key_document[:, None, :])",
    ),
    Mutant(
        "padding counts in distances",
        "model/positions.py",
        "self.index_distance - self.gaps[:, None, :] +",
        "self.index_distance +",
        tests=("decoding",),
    ),
    Mutant(
        "a block starts one key late",
        "model/positions.py",
        "self.start + rows.start - columns.start",
        "self.start + rows.start - columns.start + 1",
        tests=("blockwise",),
    ),
    Mutant(
        "a block forgets which keys are padding",
        "model/positions.py",
        "key_valid=cut(self.key_valid, columns)",
        "key_valid=None",
        tests=("blockwise",),
    ),
    Mutant("no mask where a window hides keys", "model/positions.py", "return outside_window or (", "return (", ("backends",)),
    Mutant(
        "the furthest key ignores the window",
        "model/positions.py",
        "furthest.clamp(max=self.window - 1)",
        "furthest",
        ("blockwise",),
    ),
    Mutant(
        "the furthest key counts padding",
        "model/positions.py",
        "if not self.contiguous or self.gaps is not None or self.hides_more:",
        "if not self.contiguous:",
    ),
    Mutant(
        "the lowest distance is one too high", "model/positions.py", "else 1 - queries - start", "else 2 - queries - start"
    ),
    Mutant(
        "padding behind a token is not numbered over",
        "model/position_builder.py",
        "(valid.cumsum(-1) > 0)",
        "(valid.cumsum(-1) > 1)",
    ),
    Mutant(
        "additive masks hide nothing",
        "model/position_builder.py",
        "return attention_mask > -1e3 if",
        "return attention_mask > -1e30 if",
    ),
    Mutant(
        "empty slots of a memory are seen",
        "model/position_builder.py",
        ">= slots - memory_length[:, None]",
        ">= -memory_length[:, None]",
    ),
    Mutant(
        "memory belongs to the next document",
        "model/position_builder.py",
        "pad(documents, (memory_slots, 0))",
        "pad(documents, (memory_slots, 0), value=1)",
    ),
    Mutant(
        "absolute positions ignore the cache",
        "model/position_builder.py",
        "before = cached[0] if cached is not None else",
        "before = 0 if cached is not None else",
    ),
    Mutant(
        "absolute positions count left padding",
        "model/position_builder.py",
        "count_in_document(valid, reset, before,",
        "count_in_document(None, reset, before,",
    ),
    Mutant(
        "a source shows its padding", "model/position_builder.py", "(valid | ~valid.any(-1, keepdim=True))", "(valid | True)"
    ),
    Mutant(
        "given numbers are not joined to the cache's",
        "model/position_builder.py",
        "key.expand(rows, -1).index_copy(1, own, query)",
        "key.expand(rows, -1)",
    ),
    Mutant(
        "a document's first token counts as the second",
        "model/position_documents.py",
        "count - first, count + before)",
        "count - first + 1, count + before)",
    ),
    Mutant(
        "seq_idx begins documents a token late",
        "model/position_documents.py",
        "starts = _shifted(seq_idx.diff(dim=-1) != 0)",
        "starts = pad(seq_idx.diff(dim=-1) != 0, (0, 1))",
    ),
    Mutant("cu_seq_lens skip the first document's end", "model/position_documents.py", "offsets[1:-1]", "offsets[2:-1]"),
    Mutant(
        "a zero behind a zero begins nothing",
        "model/position_documents.py",
        "((step < 0) | ((step == 0) & ~repeated))",
        "(step < 0)",
    ),
    Mutant("position ids that go back mark documents", "model/position_documents.py", "zero & ~interleaved &", "zero &"),
    Mutant("cached numbers are forgotten", "model/position_ids_cache.py", "own.layers.append(layer)", "own.layers.extend([])"),
    Mutant("cached numbers change in a refused call", "model/position_ids_cache.py", "else _copy(known)", "else known"),
    Mutant(
        "targets that are none see keys",
        "model/position_two_stream.py",
        "seen = visible.any(-1)[:, 0] & named",
        "seen = visible.any(-1)[:, 0]",
    ),
    Mutant(
        "the query stream sees what the order hides",
        "model/position_two_stream.py",
        "visible = positions.visible & ~_over_keys(hidden, positions)\n    if",
        "visible = positions.visible\n    if",
    ),
    Mutant(
        "the content stream does not see itself",
        "model/position_two_stream.py",
        "| _itself(positions))",
        "& ~_itself(positions))",
    ),
    # Tables over distances.
    Mutant(
        "kept tables serve other distances",
        "model/position_tables.py",
        "return low, high, self.made_for.dtype",
        "return 0, high, self.made_for.dtype",
    ),
    Mutant(
        "kept tables outlive changed weights", "model/position_tables.py", "or not _same(entry.weights, weights)", "or False"
    ),
    Mutant("kept tables outlive their scheme", "model/position_tables.py", "or entry.scheme is not scheme", "or False"),
    Mutant(
        "tables are kept in training",
        "model/position_tables.py",
        "self._store is None or scheme.training else",
        "self._store is None else",
    ),
    Mutant(
        "tables are kept while gradients run",
        "model/position_tables.py",
        "positions.causal and not torch.is_grad_enabled()",
        "positions.causal",
    ),
    Mutant(
        "kept tables outlive their precision",
        "model/position_tables.py",
        "or entry.settings != self._settings",
        "or entry.settings[:2] != self._settings[:2]",
    ),
    Mutant(
        "wide gaps take the wrong distances",
        "model/position_tables.py",
        "return torch.unique(self.positions.distance, return_inverse=True)",
        "return torch.unique(self.positions.distance.abs(), return_inverse=True)",
        ("position_ids",),
    ),
    Mutant(
        "numbers are laid out a distance off",
        "model/position_tables.py",
        ".unfold(-1, keys, 1).flip(-2)[None]",
        ".unfold(-1, keys, 1)[None]",
    ),
    Mutant(
        "the shift is not taken",
        "model/toeplitz.py",
        "[..., 1:, :].reshape(*outer, rows, columns)",
        "[..., :-1, :].reshape(*outer, rows, columns)",
    ),
    Mutant(
        "far distances have the nearest vector",
        "model/toeplitz.py",
        "((out[..., : near.before], 0), (out[..., last:], -1))",
        "((out[..., : near.before], -1), (out[..., last:], -1))",
    ),
    Mutant(
        "gradients of far vectors are lost", "model/toeplitz.py", "if near.before:\n        kept", "if False:\n        kept"
    ),
    Mutant(
        "gradients of near vectors are halved",
        "model/toeplitz.py",
        "flat.transpose(-1, -2), _by_head(states, vectors))\n    return",
        "flat.transpose(-1, -2) / 2, _by_head(states, vectors))\n    return",
    ),
    Mutant(
        "matrices of rows begin a row off",
        "model/toeplitz.py",
        "strides = (*numbers.stride()[:-2], row + 1, 1)",
        "strides = (*numbers.stride()[:-2], row, 1)",
    ),
    # Segment memory.
    Mutant(
        "the memory holds the oldest tokens",
        "model/segment_memory.py",
        "hidden = stream[:, :, sequence:]",
        "hidden = stream[:, :, : memory.slots]",
    ),
    Mutant(
        "the memory counts no new tokens",
        "model/segment_memory.py",
        "(carried + fresh).clamp(max=slots)",
        "carried.clamp(max=slots)",
    ),
    Mutant(
        "the memory outlives its document",
        "model/segment_memory.py",
        "torch.where(last[:, 0] == 0, memory.length, 0)",
        "memory.length",
    ),
    Mutant(
        "padding is remembered",
        "model/segment_memory.py",
        "(counts * counts.shape[1] + number).argsort(dim=1)",
        "number.expand_as(counts)",
    ),
    Mutant(
        "remembered tokens are out of order",
        "model/segment_memory.py",
        "number).argsort(dim=1)",
        "number).argsort(dim=1).flip(1)",
    ),
    Mutant("a reset forgets the other rows", "model/segment_memory.py", "masked_fill(rows, 0)", "masked_fill(~rows, 0)"),
    Mutant(
        "a smaller memory keeps the oldest",
        "model/segment_memory.py",
        "self.hidden[:, :, self.slots - slots :]",
        "self.hidden[:, :, :slots]",
    ),
    Mutant(
        "detach leaves the graph",
        "model/segment_memory.py",
        "SegmentMemory(self.hidden.detach(), self.length)",
        "SegmentMemory(self.hidden, self.length)",
    ),
    Mutant("select reorders hidden states only", "model/segment_memory.py", "self.length[rows])", "self.length)"),
    Mutant(
        "reuse_len counts padding",
        "model/segment_memory.py",
        "valid & (valid.cumsum(1) <= reuse)",
        "valid & (torch.ones_like(valid).cumsum(1) <= reuse)",
    ),
    Mutant(
        "a memory of the wrong shape passes",
        "model/segment_memory.py",
        "if tuple(memory.hidden.shape) != expected:",
        "if False:",
    ),
    Mutant(
        "a window loses keys behind padding without a word",
        "model/sliding_cache.py",
        "if known((first - last < window).any()):",
        "if False:",
    ),
    Mutant(
        "the memory is not detached",
        "model/modeling_relpos.py",
        "memory = memory.detach() if self.config.detach_memory else memory",
        "memory = memory",
    ),
    Mutant(
        "an encoder's memory is not detached",
        "model/modeling_relpos.py",
        "self.config.reuse_len).detach()",
        "self.config.reuse_len)",
    ),
    Mutant(
        "a cache is returned where none was asked for",
        "model/modeling_relpos.py",
        "cache=None if use_cache is False else cache, memory=memory)",
        "cache=cache, memory=memory)",
    ),
    Mutant(
        "layers share one memory",
        "model/transformer_stack.py",
        "memory.hidden[:, index],",
        "memory.hidden[:, 0],",
        ("memory",),
    ),
    Mutant(
        "what is remembered is not normalised",
        "model/transformer_layer.py",
        "return self.attention_norm(inputs) if self.pre_norm else inputs",
        "return torch.cat([memory, self.attention_norm(own)], 1) if memory is not None and self.pre_norm else self.attention_norm(inputs) if self.pre_norm else inputs",
    ),
    Mutant(
        "memory_to_cache normalises nothing",
        "model/generation_relpos.py",
        "context = layer.context(None, memory.hidden[:, index, memory.slots - tokens :])",
        "context = memory.hidden[:, index, memory.slots - tokens :]",
    ),
    Mutant(
        "memory_to_cache takes the wrong slots",
        "model/generation_relpos.py",
        "memory.hidden[:, index, memory.slots - tokens :]",
        "memory.hidden[:, index, :tokens]",
    ),
    Mutant(
        "read skips the last segment",
        "model/generation_relpos.py",
        "range(0, input_ids.shape[1], segment_len)",
        "range(0, max(1, input_ids.shape[1] - segment_len), segment_len)",
    ),
    Mutant("beams share a memory's first row", "model/generation_relpos.py", "if copies > 1:", "if False:"),
    # Schemes.
    Mutant(
        "learned positions start at one",
        "model/scheme_absolute.py",
        "self.position_embeddings[in_document]",
        "self.position_embeddings[(in_document + 1).clamp(max=self.bound - 1)]",
    ),
    Mutant(
        "learned positions have no bound",
        "model/scheme_absolute.py",
        "if first < 0 or last >= self.bound:",
        "if False:",
        ("matrix",),
    ),
    Mutant(
        "sinusoids are cosines first",
        "model/scheme_base.py",
        "torch.stack([angle.sin(), angle.cos()]",
        "torch.stack([angle.cos(), angle.sin()]",
    ),
    Mutant("scores are scaled twice", "model/scheme_base.py", "return self.head_dim**-0.5", "return self.head_dim**-1.0"),
    Mutant("a number out of bounds passes", "model/scheme_base.py", "if not good:", "if False:"),
    Mutant(
        "clipped distances are one short",
        "model/scheme_bias.py",
        "clamp(-self.max_distance, 0 if self.causal else self.max_distance) + self.max_distance",
        "clamp(-self.max_distance + 1, 0 if self.causal else self.max_distance) + self.max_distance",
    ),
    Mutant("bucket borders are one off", "model/scheme_bias.py", "exact = per_side // 2\n", "exact = per_side // 2 + 1\n"),
    Mutant(
        "T5 mixes up the directions",
        "model/scheme_bias.py",
        "torch.where(distance > 0, per_side, 0)",
        "torch.where(distance < 0, per_side, 0)",
    ),
    Mutant(
        "T5 scales its scores",
        "model/scheme_bias.py",
        "return super().scale() if self.scale_scores else 1.0\n\n    def query_gain",
        "return super().scale()\n\n    def query_gain",
    ),
    Mutant(
        "T5's queries begin large",
        "model/scheme_bias.py",
        "return 1.0 if self.scale_scores else self.head_dim**-0.5",
        "return 1.0",
        ("combined",),
    ),
    Mutant(
        "ALiBi rewards distance",
        "model/scheme_bias.py",
        "bias = -slopes[:, None] * distances.values.abs()",
        "bias = slopes[:, None] * distances.values.abs()",
    ),
    Mutant(
        "ALiBi's slopes of other head counts", "model/scheme_bias.py", "powers(2 * lower)[0::2]", "powers(2 * lower)[1::2]"
    ),
    Mutant("ALiBi's split sides are swapped", "model/scheme_bias.py", "[:, None] % 2 == 0", "[:, None] % 2 == 1"),
    Mutant(
        "KERPLE's exponent reaches beyond 2",
        "model/scheme_bias.py",
        "distance ** (2 * p.sigmoid())",
        "distance ** (3 * p.sigmoid())",
    ),
    Mutant(
        "KERPLE's kernel as a weight is not less one",
        "model/scheme_bias.py",
        "self._kernel(a, p, tables.distances).expm1()",
        "self._kernel(a, p, tables.distances).exp()",
    ),
    Mutant(
        "Sandwich's heads are in the other order",
        "model/scheme_bias.py",
        "self.heads / (8 * head[:, None])",
        "self.heads / (8 * head.flip(0)[:, None])",
    ),
    Mutant(
        "the network of the distance has the other sign",
        "model/scheme_bias.py",
        "back = -distances.values.to(distances.dtype)",
        "back = distances.values.to(distances.dtype)",
    ),
    Mutant("a learned bias is not initialised", "model/scheme_bias.py", "init.zeros_(self.bias)", "init.ones_(self.bias)"),
    Mutant("T5's bias begins at zero", "model/scheme_bias.py", "init.normal_(self.bias, std=std)", "init.zeros_(self.bias)"),
    Mutant("KERPLE begins elsewhere", "model/scheme_bias.py", "uniform_(0.01, 0.99)", "uniform_(0.01, 0.02)"),
    Mutant(
        "a combination has the rotary part's scale",
        "model/scheme_combined.py",
        "return self.added.scale()",
        "return self.rotary.scale()",
    ),
    Mutant(
        "a combination turns queries only",
        "model/scheme_combined.py",
        'return self.rotary.call("encode_key", key, prepared)',
        "return key",
    ),
    Mutant(
        "DeBERTa's bucket borders are one off",
        "model/scheme_deberta.py",
        "distance.abs() <= exact, distance,",
        "distance.abs() < exact, distance,",
    ),
    Mutant(
        "DeBERTa's two sides are swapped",
        "model/scheme_deberta.py",
        "query_vectors=keys, key_vectors=queries",
        "query_vectors=queries, key_vectors=keys",
    ),
    Mutant(
        "DeBERTa's p2c takes the paper's row",
        "model/scheme_deberta.py",
        'if self.p2c_index == "paper" else rows["key"]',
        'if self.p2c_index != "paper" else rows["key"]',
    ),
    Mutant(
        "DeBERTa's table drops out in evaluation",
        "model/scheme_deberta.py",
        "self.dropout, self.training)",
        "self.dropout, True)",
        ("heads",),
    ),
    Mutant("DeBERTa's scale counts one term", "model/scheme_deberta.py", "(1 + len(self.meeting))", "2"),
    Mutant(
        "DeBERTa's table is not initialised",
        "model/scheme_deberta.py",
        "init.normal_(self.table, std=std)",
        "init.zeros_(self.table)",
    ),
    Mutant(
        "CoPE counts from the far end",
        "model/scheme_dense.py",
        "@ key.flip(-2).transpose(-1, -2)",
        "@ key.transpose(-1, -2)",
    ),
    Mutant(
        "CoPE counts hidden keys",
        "model/scheme_dense.py",
        'masked_fill_(~positions.visible.flip(-1), float("-inf"))',
        'masked_fill_(torch.zeros_like(positions.visible), float("-inf"))',
    ),
    Mutant(
        "CoPE does not mix two positions",
        "model/scheme_dense.py",
        "place - below, step.gather",
        "torch.zeros_like(place), step.gather",
    ),
    Mutant(
        "FIRE's divisor has no threshold",
        "model/scheme_dense.py",
        "torch.maximum(positions.furthest.to(positions.dtype), (factor * self.threshold).abs())",
        "positions.furthest.to(positions.dtype)",
    ),
    Mutant(
        "FIRE divides by the threshold at all distances",
        "model/scheme_dense.py",
        "max(-distances.low, distances.high) <= limit",
        "True",
    ),
    Mutant("FIRE's table ends a step late", "model/scheme_dense.py", "<= limit:", "<= limit + 3:"),
    Mutant(
        "FIRE's lines lose their height",
        "model/scheme_dense.py",
        "(output * bias) @ line], 1)",
        "(output * bias * 0) @ line], 1)",
    ),
    Mutant(
        "FIRE's units are not initialised",
        "model/scheme_dense.py",
        "for weight, inputs in ((self.hidden_weight, 1), (self.hidden_bias, 1), (self.output_weight, self.width)):\n            init.uniform_(weight, -(inputs**-0.5), inputs**-0.5)",
        "for weight in (self.hidden_weight, self.hidden_bias, self.output_weight):\n            init.zeros_(weight)",
    ),
    Mutant(
        "DAPE forgets its prior",
        "model/scheme_dense.py",
        "ScoreTerms(bias=prior.bias, dense=adapted",
        "ScoreTerms(dense=adapted",
    ),
    Mutant(
        "DAPE reads scores that are not scaled",
        "model/scheme_dense.py",
        "scores = ((query * self.scale()) @ key.transpose(-1, -2)).to(positions.dtype)\n        with",
        "scores = (query @ key.transpose(-1, -2)).to(positions.dtype)\n        with",
    ),
    Mutant(
        "gates grow instead of decay",
        "model/scheme_gates.py",
        "return -softplus(self.project(context))",
        "return softplus(self.project(context))",
    ),
    Mutant("FoX starts open", "model/scheme_gates.py", "bias_init: float = 0.0", "bias_init: float = 2.0"),
    Mutant(
        "times of decay run the other way",
        "model/scheme_gates.py",
        "-torch.linspace(-low, -high,",
        "-torch.linspace(-high, -low,",
    ),
    Mutant("gates of padding count", "model/running_sums.py", "if positions.key_valid is not None:", "if False:"),
    Mutant(
        "sums run in single precision",
        "model/running_sums.py",
        'torch.float32 if gates.device.type == "mps" else torch.float64',
        "torch.float32",
    ),
    Mutant(
        "half precision keeps one part of a gate", "model/running_sums.py", "return 3 if dtype.itemsize < 4 else 1", "return 1"
    ),
    Mutant(
        "a query's own gate is left out",
        "model/running_sums.py",
        "return sums.index_select(-1, own)",
        "return sums.index_select(-1, (own - 1).clamp(min=0))",
    ),
    Mutant(
        "dense terms add sums the wrong way",
        "model/scheme_terms.py",
        "own[..., None] - terms.sums[..., None, :]",
        "terms.sums[..., None, :] - own[..., None]",
    ),
    Mutant(
        "spare distances are not cut off",
        "model/scheme_terms.py",
        "for name in names if spare and",
        "for name in names if False and",
    ),
    Mutant(
        "vectors of far distances are a row off",
        "model/scheme_terms.py",
        "distances.values.clamp(low, high) - low",
        "distances.values.clamp(low + 1, high) - low",
    ),
    Mutant(
        "v of Transformer-XL is left out",
        "model/scheme_terms.py",
        "query if terms.distance_offset is None else",
        "query if True else",
    ),
    Mutant(
        "vectors of keys are not scaled",
        "model/scheme_terms.py",
        "tables.gather_keys((key * scale) @",
        "tables.gather_keys(key @",
    ),
    Mutant(
        "Shaw's values have the keys' vectors",
        "model/scheme_vectors.py",
        'self._vectors("value_table", distances) if',
        'self._vectors("key_table", distances) if',
    ),
    Mutant(
        "Shaw's vectors end at zero",
        "model/scheme_vectors.py",
        'if self.outside == "clamp" else pad',
        'if self.outside != "clamp" else pad',
    ),
    Mutant(
        "Shaw's tables are not initialised", "model/scheme_vectors.py", "init.xavier_uniform_(table)", "init.zeros_(table)"
    ),
    Mutant(
        "Transformer-XL's table drops out in evaluation",
        "model/scheme_vectors.py",
        "self.dropout, self.training)",
        "self.dropout, True)",
        ("heads",),
    ),
    Mutant(
        "Transformer-XL's distances are negative",
        "model/scheme_vectors.py",
        "back = -distances.values\n",
        "back = distances.values\n",
    ),
    Mutant(
        "clamp_len is one short",
        "model/scheme_vectors.py",
        "back.clamp(-self.clamp_len, self.clamp_len)",
        "back.clamp(-self.clamp_len + 1, self.clamp_len - 1)",
    ),
    Mutant(
        "Transformer-XL's offsets begin at zero",
        "model/scheme_vectors.py",
        "init.normal_(learned, std=std)",
        "init.zeros_(learned)",
    ),
    Mutant(
        "XLNet's segments are swapped", "model/scheme_vectors.py", "met[..., :1], met[..., 1:])", "met[..., 1:], met[..., :1])"
    ),
    Mutant(
        "Music's table is one short",
        "model/scheme_vectors.py",
        "span=(-self.max_distance, 1)",
        "span=(-self.max_distance + 1, 2)",
    ),
    Mutant(
        "rotation turns backwards",
        "model/scheme_rotary.py",
        "first * cos - second * sin, second * cos + first * sin",
        "first * cos + second * sin, second * cos - first * sin",
    ),
    Mutant(
        "rotation pairs the wrong channels",
        "model/scheme_rotary.py",
        "if interleaved else rotated.chunk(2, -1)",
        "if not interleaved else rotated.chunk(2, -1)",
    ),
    Mutant(
        "keys are turned by the queries' angles",
        "model/scheme_rotary.py",
        "return rotate(key, prepared[1], self.interleaved)",
        "return rotate(key, (prepared[0][0][:, : key.shape[2]], prepared[0][1][:, : key.shape[2]]), self.interleaved) if prepared[0][0].shape[1] >= key.shape[2] else rotate(key, prepared[1], self.interleaved)",
        ("memory",),
    ),
    Mutant(
        "yarn's factor is left out",
        "model/scheme_rotary.py",
        "return inv_freq.to(positions.dtype), factor",
        "return inv_freq.to(positions.dtype), 1.0",
    ),
    Mutant(
        "xPos decays the wrong way",
        "model/scheme_rotary.py",
        "distance = middle - torch.minimum(positions.key, last)",
        "distance = torch.minimum(positions.key, last) - middle",
    ),
    Mutant("PoPE's magnitudes may be negative", "model/scheme_rotary.py", "size = softplus(states)", "size = states"),
    Mutant(
        "PoPE's phase turns the other way",
        "model/scheme_rotary.py",
        "cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin",
        "cos * turn_cos + sin * turn_sin, sin * turn_cos - cos * turn_sin",
    ),
    # Attention and layers.
    Mutant(
        "dropout acts in evaluation",
        "model/attention.py",
        "self.attention_dropout if self.training else 0.0",
        "self.attention_dropout",
        ("heads",),
    ),
    Mutant(
        "what acts behind the cache is left out",
        "model/attention.py",
        'query, key = to_device(scheme("scale_after_cache", query, key, prepared), device)',
        "query, key = query, key",
    ),
    Mutant(
        "a query stream reads its own keys",
        "model/transformer_layer.py",
        "hidden_states if content is None else content), hidden_states",
        "hidden_states), hidden_states",
        ("permutation",),
    ),
    Mutant(
        "grouped heads take turns",
        "model/attention_backends.py",
        "states.repeat_interleave(groups, dim=1)",
        "states.repeat(1, groups, 1, 1)",
    ),
    Mutant(
        "the mask is left out of the eager path", "model/attention_backends.py", "if attention_mask is not None:", "if False:"
    ),
    Mutant(
        "the mask is left out of the flex path",
        "model/attention_backends.py",
        "bias.masked_fill(~positions.visible, torch.finfo(query.dtype).min)",
        "bias + torch.zeros_like(positions.visible, dtype=query.dtype)",
    ),
    Mutant(
        "the mask is left out of the fused path",
        "model/attention_backends.py",
        "positions.visible if positions.needs_mask else None)",
        "None)",
    ),
    Mutant(
        "u of Transformer-XL is left out of the dense path",
        "model/attention_backends.py",
        "query if terms.key_offset is None else query +",
        "query if True else query +",
    ),
    Mutant(
        "values' vectors are left out of the eager path",
        "model/attention_backends.py",
        "output if added is None else output + added",
        "output if True else output + added",
    ),
    Mutant("softmax runs in half precision", "model/attention_backends.py", "dim=-1, dtype=wide)", "dim=-1)"),
    Mutant(
        "the residual is normalised before it is added",
        "model/transformer_layer.py",
        "return total if self.pre_norm else norm(total)",
        "return total if self.pre_norm else residual + norm(added)",
    ),
    Mutant("output projections begin large", "model/transformer_layer.py", "(len(outputs) * num_layers) ** -0.5", "1.0"),
    Mutant(
        "the gate of the feed-forward layer is left out",
        "model/transformer_layer.py",
        "self.act(self.gate_proj(hidden_states)) * up",
        "self.act(up)",
    ),
    Mutant("embeddings are not scaled", "model/transformer_stack.py", "embeds * embeds.shape[-1] ** 0.5 if", "embeds if"),
    Mutant(
        "there is no last norm",
        "model/transformer_stack.py",
        "return last if self.norm is None else self.norm(last), entered",
        "return last, entered",
    ),
    Mutant(
        "schemes are not initialised", "model/transformer_stack.py", "module.initialize(self.config.initializer_range)", "pass"
    ),
    # Blocks.
    Mutant(
        "blocks show a key beyond the window",
        "model/blockwise_attention.py",
        "distance.abs() >= positions.window",
        "distance.abs() > positions.window",
    ),
    Mutant(
        "blocks show the future",
        "model/blockwise_attention.py",
        "unseen = distance > 0 if positions.ordered",
        "unseen = distance > 1 if positions.ordered",
    ),
    Mutant(
        "blocks return queries backwards", "model/blockwise_attention.py", "output[..., :size].flip(-2)", "output[..., :size]"
    ),
    Mutant(
        "blocks forget the vectors of values",
        "model/blockwise_attention.py",
        "output = output + weighted(along",
        "output = output + 0 * weighted(along",
    ),
    Mutant(
        "rows of the batch change places",
        "model/blockwise_attention.py",
        "torch.cat([rows for rows, _ in split]).argsort()",
        "torch.cat([rows for rows, _ in split])",
    ),
    Mutant("gradients of a bias are halved", "model/blockwise_backward.py", ").sum((1, 2))", ").sum((1, 2)) / 2"),
    Mutant(
        "gradients of the keys' offset are lost",
        "model/blockwise_backward.py",
        "_add_query(total, (score_grad @ part.key[..., :size]) * self.plan.scale, total.key_offset)",
        "_add_query(total, (score_grad @ part.key[..., :size]) * self.plan.scale, None)",
    ),
    Mutant(
        "gradients of the distances' offset are lost",
        "model/blockwise_backward.py",
        "_add_query(total, gradient * scale, total.distance_offset)",
        "_add_query(total, gradient * scale, None)",
    ),
    Mutant(
        "gradients of values are not dropped out",
        "model/blockwise_backward.py",
        "used = weights if factor is None else weights.mul_(factor)",
        "used = weights",
    ),
    Mutant(
        "scores' gradients are not dropped out",
        "model/blockwise_backward.py",
        "score_grad = score_grad if factor is None else score_grad.mul_(factor)",
        "score_grad = score_grad",
    ),
    Mutant(
        "gradients of keys by vectors are not scaled",
        "model/blockwise_backward.py",
        "total.key.add_(gradient * scale)",
        "total.key.add_(gradient)",
    ),
    Mutant(
        "gradients of FIRE's factors come from one head",
        "model/blockwise_backward.py",
        "self.sums.distance[block.heads] +=",
        "self.sums.distance[block.heads] =",
    ),
    Mutant("half precision leaves a remainder", "model/blockwise_backward.py", "if not exact:", "if False:"),
    Mutant(
        "dropout differs in the backward pass",
        "model/blockwise_forward.py",
        "plan.seed + (head << 24) + block.rows.start",
        "plan.seed + int(torch.randint(1000, ()))",
    ),
    Mutant(
        "blocks skip the scale of keys' vectors",
        "model/blockwise_forward.py",
        "add_key_products(scores, parts.key * plan.scale,",
        "add_key_products(scores, parts.key,",
    ),
    Mutant(
        "blocks forget padding",
        "model/blockwise_forward.py",
        "if block.positions.hides_more:\n        seen",
        "if False:\n        seen",
    ),
    Mutant(
        "blocks of queries lose their last row",
        "model/blockwise_forward.py",
        "slice(queries - last, queries - first), columns, distances, inside)",
        "slice(queries - last, queries - first), columns, slice(distances.start - 1, distances.stop - 1), inside)",
    ),
    Mutant(
        "tiles of keys meet the wrong window",
        "model/blockwise_key_terms.py",
        "torch.arange(first, first + columns + rows - 1,",
        "torch.arange(first + 1, first + columns + rows,",
    ),
    Mutant(
        "gradients of far keys' vectors are lost",
        "model/blockwise_key_terms.py",
        "total[:, entry] += found",
        "total[:, entry] += 0 * found",
    ),
    Mutant(
        "runs of keys end a key early",
        "model/blockwise_masking.py",
        "slice(self.ends[begin - 1] if begin else 0, self.ends[end])",
        "slice(self.ends[begin - 1] if begin else 0, self.ends[end] - 1)",
    ),
    Mutant(
        "a block's window begins a key late",
        "model/blockwise_masking.py",
        "max(0, begin + 1 - positions.window)",
        "max(0, begin + 2 - positions.window)",
    ),
    Mutant(
        "padding takes a document's keys",
        "model/blockwise_masking.py",
        "if any(label < 0 or self.labels.count(label) > 1 for label in met):",
        "if False:",
    ),
    Mutant("sums' gradients reach the wrong queries", "model/blockwise_sums.py", "+= of_rows.flip(-1)", "+= of_rows"),
    Mutant("sums' gradients leave out the keys", "model/blockwise_sums.py", "sums.sub_(of_keys)", "sums.sub_(0 * of_keys)"),
    Mutant(
        "groups of rows take each other's channels",
        "model/blockwise_sums.py",
        "(row[:, None] == group).to(query.dtype)",
        "(row[:, None] <= group).to(query.dtype)",
    ),
    # Heads.
    Mutant(
        "labels are shifted twice",
        "model/modeling_relpos.py",
        "nn.functional.pad(labels[:, 1:], (0, 1), value=-100)",
        "nn.functional.pad(labels[:, 2:], (0, 2), value=-100)",
    ),
    Mutant(
        "losses ignore the number of items",
        "model/head_losses.py",
        "if num_items_in_batch is None:\n        return",
        "if True:\n        return",
    ),
    Mutant(
        "no target makes the loss infinite",
        "model/head_losses.py",
        "targets.ne(IGNORED).sum().clamp(min=1)",
        "targets.ne(IGNORED).sum()",
    ),
    Mutant("labels out of range pass", "model/head_losses.py", "if wrong.numel():", "if False:"),
    Mutant(
        "answers that were cut off count",
        "model/head_losses.py",
        "given.masked_fill(given >= logits.shape[1], IGNORED)",
        "given.clamp(max=logits.shape[1] - 1)",
    ),
    Mutant(
        "several labels count the missing ones", "model/head_losses.py", "losses.masked_fill(~known, 0).sum()", "losses.sum()"
    ),
    Mutant(
        "the loss of an answer is a sum",
        "model/head_losses.py",
        "return (losses[0] + losses[1]) / 2",
        "return losses[0] + losses[1]",
    ),
    Mutant(
        "adaptive clusters are a token off",
        "model/adaptive_softmax.py",
        "torch.bucketize(kept, edges, right=True)",
        "torch.bucketize(kept, edges, right=False)",
    ),
    Mutant(
        "adaptive losses forget the cluster",
        "model/adaptive_softmax.py",
        "column = torch.where(cluster == 0, kept, self.bounds[0][1] + cluster - 1)",
        "column = torch.where(cluster == 0, kept, self.bounds[0][1])",
    ),
    # Folders and configurations.
    Mutant(
        "weights of another scheme end a load",
        "model/weight_loading.py",
        "load_config = replace(load_config, ignore_mismatched_sizes=True)",
        "pass",
    ),
    Mutant(
        "a derived field stays behind",
        "model/configuration_changes.py",
        "if name not in following or not _is_derived(kind, own, name)}",
        "}",
    ),
    Mutant("given parameters are lost", "model/configuration_changes.py", "return kept | given", "return given | kept"),
    Mutant(
        "the window ignores the memory", "model/configuration_relpos.py", "self.mem_len + 1 if self.mem_len else None", "None"
    ),
    Mutant(
        "the code's addresses are not saved",
        "model/configuration_relpos.py",
        "self.auto_map = dict(self.family_auto_map)",
        "pass",
    ),
    # Data.
    Mutant("labels cross the ends of documents", "data/lanes.py", "labels[1:].masked_fill(reset[1:] > 0, end)", "labels[1:]"),
    Mutant(
        "lanes are read across instead of along",
        "data/lanes.py",
        "self._complete(lane * self.steps + step)",
        "self._complete(step * self.rows + lane)",
    ),
    Mutant("a lane begins with its reader's memory", "data/lanes.py", "if step == 0:", "if False:"),
    Mutant(
        "targets end with the block",
        "data/lanes.py",
        "if not block.keys() >= TARGETS and index + 1 < len(self.blocks):",
        "if False:",
    ),
    Mutant(
        "padding becomes a target",
        "data/lanes.py",
        'labels = labels.masked_fill(columns["attention_mask"] == 0, IGNORED)',
        "labels = labels",
    ),
    Mutant(
        "a token stands in two blocks",
        "data/packing.py",
        "tokens, starts = tokens[whole:], starts[whole:]",
        "tokens, starts = tokens[whole - 1 :], starts[whole - 1 :]",
    ),
    Mutant(
        "documents end without an end token",
        "data/packing.py",
        "np.where(starts[1 : whole + 1] == 1, end, tokens[1 : whole + 1])",
        "tokens[1 : whole + 1]",
    ),
    Mutant(
        "padding is learned",
        "data/packing.py",
        '"shift_labels": (following.astype(np.int32), IGNORED)',
        '"shift_labels": (following.astype(np.int32), 0)',
    ),
    Mutant(
        "special tokens are masked",
        "data/packing.py",
        "special_tokens_mask=special)",
        "special_tokens_mask=torch.zeros_like(special))",
    ),
    Mutant(
        "documents have no start token",
        "data/tokenizing.py",
        "places = np.append(0, ends[:-1])[begins] if",
        "places = np.append(0, ends[:-1])[begins][:0] if",
    ),
    Mutant(
        "special tokens in a text are special", "data/tokenizing.py", "split_special_tokens=True", "split_special_tokens=False"
    ),
    Mutant(
        "evaluation reads a document twice",
        "data/streams.py",
        "start, number = stop, number + 1",
        "start, number = stop - (stop < end), number + 1",
    ),
    Mutant(
        "evaluation carries memory from text to text",
        "data/streams.py",
        'columns["reset_mask"][0] = 1\n            yield',
        "pass\n            yield",
    ),
    Mutant(
        "a lane of a stream loses the rest of a row",
        "data/stream_lanes.py",
        "self._offset -= len(self._rows.popleft()",
        "self._offset = 0 * len(self._rows.popleft()",
    ),
    Mutant(
        "a lane of a stream goes on elsewhere",
        "data/stream_lanes.py",
        'self.blocks, self._passed, self._offset = state["blocks"], state["passed"], state["offset"]',
        'self.blocks, self._passed, self._offset = state["blocks"], state["passed"], 0',
    ),
    Mutant(
        "another text is read on without a word",
        "data/stream_lanes.py",
        'or _digest(self._rows[0][1]) != state["digest"]',
        "or False",
    ),
    Mutant(
        "validation text is trained on",
        "data/hold_out.py",
        "_take(documents, ~held, split",
        "_take(documents, held | True, split",
    ),
    Mutant(
        "words that are given apart have no spaces",
        "data/tokenizers.py",
        'words[0], *(" " + word if',
        'words[0], *("" + word if',
    ),
    Mutant(
        "caches of other settings are taken",
        "data/tables.py",
        "_digest([VERSION, kind, key])",
        "_digest([VERSION, kind])",
    ),
    # Training.
    Mutant(
        "accumulated batches share a memory",
        "training/segment_trainer.py",
        "self._turn = (self._turn + 1) % self._turns",
        "self._turn = 0",
    ),
    Mutant(
        "memory is kept from call to call",
        "training/segment_trainer.py",
        "# again for each size of auto_find_batch_size\n        self._forget()",
        "\n        self._turn = 0",
    ),
    Mutant(
        "evaluation begins with memory",
        "training/segment_trainer.py",
        "self._eval_memory, self._eval_sums = None, 0\n        output",
        "self._eval_sums = 0\n        output",
    ),
    Mutant(
        "a resumed run begins at the first turn",
        "training/segment_trainer.py",
        "self._turn = self.state.global_step * self.args.gradient_accumulation_steps % self._turns",
        "self._turn = 0",
    ),
    Mutant("a resumed run forgets its memory", "training/segment_trainer.py", "if part.length.any()}", "if False}"),
    Mutant(
        "processes swap their lanes",
        "training/segment_trainer.py",
        "view(shape)[:, self.accelerator.process_index]",
        "view(shape)[:, -1 - self.accelerator.process_index]",
        ("segment_ddp", "resume"),
    ),
    Mutant(
        "the memory stays in autocast's precision",
        "training/segment_trainer.py",
        ".detach().to(self.model.dtype), rest",
        ".detach(), rest",
    ),
    Mutant("another reading of the text resumes", "training/segment_checkpoint.py", "if found.get(name) != value", "if False"),
    Mutant("a loss that is no number goes on", "training/checked_trainer.py", "if not loss.isfinite().all():", "if False:"),
    Mutant(
        "weights that are no numbers are saved", "training/checked_trainer.py", "self._try_weights()\n        folder", "folder"
    ),
    Mutant("position tables have the common rate", "training/optimizer.py", '"lr": position_rate}', '"lr": learning_rate}'),
    Mutant(
        "weight decay holds for norms",
        "training/optimizer.py",
        '{"params": kinds["plain"], "weight_decay": 0.0}',
        '{"params": kinds["plain"], "weight_decay": weight_decay}',
    ),
    Mutant(
        "a changed checkpoint counts as whole",
        "training/checkpoints.py",
        "if name in files and _known_sha256(files[name], files[name].stat().st_mtime_ns) != digest",
        "if False",
    ),
    Mutant("two runs write into one folder", "training/folder_lock.py", "if lock is None:", "if False:"),
    Mutant("workers go on holding a folder", "training/folder_lock.py", "    _held.add(lock)\n", ""),
    Mutant("a changed table is taken", "data/tables.py", "and content[1] == _stamp(table)", "", ("data",)),
    Mutant("a damaged checkpoint counts as whole", "training/checkpoints.py", "if damage := _damage(path):", "if False:"),
    Mutant(
        "the oldest checkpoint is taken",
        "training/checkpoints.py",
        'int(path.name.split("-")[1]), reverse=True)',
        'int(path.name.split("-")[1]))',
    ),
]
