"""NSAForCausalLM: the blocks of `nsa.model` as a model of transformers, with padding, a cache, loss and `generate`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.generation import GenerationConfig, GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from nsa.compression import LinearCompression, MLPCompression
from nsa.integrations.transformers.cache import NSACache
from nsa.integrations.transformers.configuration import NSAConfig
from nsa.integrations.transformers.documents import Documents, documents
from nsa.integrations.transformers.inputs import check_inputs, check_labels, check_prompts, refuse
from nsa.layer import NativeSparseAttention
from nsa.loss import IGNORED
from nsa.model import Block, DecoderLM
from nsa.paged.cache import PagedRows

_PREFIXES = {
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
}
"""How names of `nsa.model.DecoderLM` begin, and those here."""
_SERVED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


class NSADecoderLayer(GradientCheckpointingLayer, Block):
    """`nsa.model.Block`, whose activations can be computed anew in the backward pass."""


class NSAPreTrainedModel(PreTrainedModel):
    """What NSA's models of transformers share."""

    config: NSAConfig
    config_class = NSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("NSADecoderLayer",)
    _skip_keys_device_placement = ("past_key_values",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As `nsa.model` starts; what a checkpoint has brought stays (`transformers.initialization` sees to that)."""
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            for parameter in module.parameters(recurse=False):
                initialization.uniform_(parameter, -bound, bound)
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, MLPCompression):
            initialization.normal_(module.position, std=0.02)

    def initialize_weights(self) -> None:
        """transformers initialises only modules that own parameters, so φ = linear is set to the mean here."""
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, LinearCompression):
                weight = module.linear.weight
                mean = torch.eye(module.head_dim, dtype=weight.dtype, device=weight.device) / module.config.l
                initialization.copy_(weight, mean.repeat(1, module.config.l))


class NSAModel(NSAPreTrainedModel):
    """Tokens [B, S] -> hidden states [B, S, hidden_size]."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        sizes = config.model_config()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(NSADecoderLayer(sizes) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def attentions(self) -> list[NativeSparseAttention]:
        """The layers that a cache serves, in their order."""
        return [cast(NativeSparseAttention, layer.attention) for layer in self.layers]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Documents | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSACache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache_position: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Causal in every case: no mask is needed for that, and none can lift it.

        Args:
            input_ids: int64 [B, S], or inputs_embeds [B, S, hidden_size] in its place.
            attention_mask: [B, T], T the tokens held and the S new ones: zero for padding, left or right. Without a
                cache also the Documents that were made of it and of position_ids.
            position_ids: [B, S]; a row without a cache that counts from 0 anew begins another packed document.
            past_key_values: an NSACache; the tokens follow those it holds.
            use_cache: make an NSACache for config.max_position_embeddings tokens where none is given. For inference.
            output_hidden_states: also return what comes into each layer, and the result; zeros where padding stands.
            cache_position: int64 [S], the columns of the new tokens; checked, never needed.

        Raises ValueError or TypeError naming the argument, also for one that is not served: output_attentions, a mask
        of another shape or with gaps, and whatever else comes by name.
        """
        refuse(output_attentions=output_attentions or self.config.output_attentions, **kwargs)
        check_inputs(input_ids, inputs_embeds, self.config.hidden_size)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache_for(past_key_values, use_cache)
        held = 0 if cache is None else cache.get_seq_length()
        if cache_position is not None and cache_position.tolist() != list(range(held, held + x.shape[1])):
            raise ValueError(
                f"cache_position must count on from the {held} columns held; got {cache_position.tolist()}"
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cache is None:
            if not isinstance(attention_mask, Documents):
                attention_mask = documents(attention_mask, position_ids, x)
            states = self._run_without_cache(x, attention_mask)
        else:
            states = self._run_with_cache(x, cache, attention_mask, position_ids)
        return BaseModelOutputWithPast(
            last_hidden_state=states[-1],
            past_key_values=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _run(self, x: Tensor, rows: PagedRows | None, cu_seqlens: Tensor | None) -> list[Tensor]:
        """What comes into each layer, and the normalised result."""
        states = [x]
        for i, layer in enumerate(self.layers):
            states.append(layer(states[-1], None if rows is None else rows.layers[i], cu_seqlens))
        states[-1] = self.norm(states[-1])
        return states

    def _run_without_cache(self, x: Tensor, found: Documents | None) -> list[Tensor]:
        if found is None:
            return self._run(x, None, None)
        packed, cu_seqlens = found.pack(x)
        return [found.unpack(state) for state in self._run(packed, None, cu_seqlens)]

    def _run_with_cache(
        self, x: Tensor, cache: NSACache, mask: Tensor | Documents | None, positions: Tensor | None
    ) -> list[Tensor]:
        """Rows that bring equally many tokens are one call: all of them while decoding."""
        size = (x.shape[0], x.shape[1])
        groups = cache.groups(size, mask, positions)
        states: list[Tensor] = []
        with cache.grow(self.attentions(), *size):
            if not groups:
                raise ValueError("attention_mask must leave at least one new token; got zeros only")
            for group in groups:
                rows = cache.rows(group.rows)
                if len(group.rows) == size[0] and group.count == size[1]:
                    return self._run(x, rows, None)
                index = group.index(x.device)
                own = self._run(x[index], rows, None)
                states = states or [x.new_zeros(x.shape) for _ in own]
                for state, part in zip(states, own, strict=True):
                    state[index] = part
        return states

    def _cache_for(self, past_key_values: object, use_cache: bool | None) -> NSACache | None:
        if past_key_values is None:
            if not use_cache:
                return None
            past_key_values = NSACache(self.config.max_position_embeddings)
        if not isinstance(past_key_values, NSACache):
            raise TypeError(f"past_key_values must be an NSACache or None; got {type(past_key_values).__name__}")
        if use_cache is False:
            raise ValueError("use_cache must not be False where past_key_values is given")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError("use_cache is for inference; call the model under torch.no_grad(), or without a cache")
        return past_key_values


class NSAForCausalLM(NSAPreTrainedModel, GenerationMixin):
    """NSAModel with a head: logits, the loss of `labels`, and `generate` (greedy, sampling, beam search)."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' way to say it)

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.model = NSAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Documents | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSACache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, S, vocab_size] in the parameters' dtype; the arguments of `NSAModel.forward`, and

        Args:
            labels: int64 [B, S], the tokens themselves (they are shifted here), -100 where none is asked for. No
                padding and no document's first token is asked for, whatever stands there.
            logits_to_keep: make the logits of the last so many columns only, or of these columns; 0 for all.
            num_items_in_batch: divides the summed loss in place of the number of labels.
        """
        found = None
        if labels is not None:
            if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
                raise ValueError("logits_to_keep must be 0 where labels are given, which ask for every column")
            batch, columns = check_inputs(input_ids, inputs_embeds, self.config.hidden_size)
            check_labels(labels, (batch, columns))
            tokens = cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds)
            if past_key_values is None and not use_cache:
                found = documents(attention_mask, position_ids, tokens)
                attention_mask, position_ids = found, None
            elif isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:  # or the model refuses it
                found = documents(attention_mask[:, -columns:], None, tokens)
        output = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
            cache_position,
            return_dict=True,
            **kwargs,
        )
        hidden = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            if found is not None:
                labels = labels.masked_fill((found.first | ~found.valid).to(labels.device), IGNORED)
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )

    @classmethod
    def from_decoder(cls, decoder: DecoderLM, **config: Any) -> NSAForCausalLM:
        """The same model, with a copy of its weights and their dtype; `config` are further fields of NSAConfig.

        ValueError for the dense twin.
        """
        model = cls(NSAConfig.from_model_config(decoder.config, **config)).to(decoder.embedding.weight)
        model.load_state_dict({_renamed(name): tensor for name, tensor in decoder.state_dict().items()})
        return model.train(decoder.training)

    def generate_batch(self, *args: object, **kwargs: object) -> None:
        """Refused: continuous batching keeps keys in pages of transformers' own."""
        raise ValueError(
            "generate_batch and cache_implementation='paged' are not served; NSA has a paged cache already"
        )

    def _validate_generation_mode(self, generation_mode: GenerationMode, *others: Any) -> None:
        """ValueError for a mode that is not served: assisted and prompt-lookup decoding crop the cache."""
        if generation_mode not in _SERVED_MODES:
            served = ", ".join(mode.value for mode in _SERVED_MODES)
            raise ValueError(f"{generation_mode.value} is not served: NSA generates by {served}")
        super()._validate_generation_mode(generation_mode, *others)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give `generate` an NSACache. ValueError for what is not served, and for prompts that end with padding."""
        check_prompts(model_kwargs.get("attention_mask"))
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "cache_implementation must be None, as NSA keeps an NSACache; "
                f"got {generation_config.cache_implementation!r}"
            )
        if generation_config.is_assistant:
            raise ValueError("assistant_model must not be an NSAForCausalLM: its cache cannot be cropped")
        if model_kwargs.get("past_key_values") is not None:
            model_kwargs["past_key_values"]._is_user_defined = True  # `generate` must leave it usable
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = NSACache(max_cache_length + 1)


def _renamed(name: str) -> str:
    """A weight's name here, from its name in `nsa.model.DecoderLM`."""
    return next(here + name.removeprefix(there) for there, here in _PREFIXES.items() if name.startswith(there))
