"""The attention of known models: what `--preset` stands for, as options of the commands."""

from __future__ import annotations

from typing import Any, NamedTuple

import click


class Preset(NamedTuple):
    """Query / key heads and head dims of a layer as options say them. A `window` is LEFT,RIGHT: a model's sliding window of n counts the
    query itself, so LEFT is n - 1. Latent attention computes over its cache with other sizes: `cached` are those."""

    heads: str
    dim: str
    causal: str = "yes"
    window: str | None = None
    softcap: float | None = None
    sink: bool = False
    seqlen: str | None = None
    cached: tuple[str, str] | None = None

    def options(self, command: str) -> dict[str, Any]:
        """The defaults that a command has under this preset."""
        if command == "decode":
            heads, dim = self.cached or (self.heads, self.dim)
            sizes: dict[str, Any] = {"heads": heads, "dim": dim}
        else:
            sizes = {"heads": self.heads, "dim": self.dim, "causal": self.causal, "seqlen": self.seqlen}
        return {name: x for name, x in {**sizes, "window": self.window, "softcap": self.softcap, "sink": self.sink}.items() if x}


# As each model's config.json on huggingface.co names them: num_attention_heads / num_key_value_heads, head_dim (else hidden_size / heads),
# sliding_window, attn_logit_softcapping. A model whose layers are of two kinds has two names, the sliding ones "-local".
PRESETS = {
    "llama3-8b": Preset("32/8", "128"),  # meta-llama/Meta-Llama-3-8B
    "llama3-70b": Preset("64/8", "128"),  # meta-llama/Meta-Llama-3-70B
    "qwen3-8b": Preset("32/8", "128"),  # Qwen/Qwen3-8B
    "qwen3-32b": Preset("64/8", "128"),  # Qwen/Qwen3-32B
    "gemma2-9b": Preset("16/8", "256", softcap=50.0),  # google/gemma-2-9b; query_pre_attn_scalar 256 is the default scale
    "gemma2-9b-local": Preset("16/8", "256", window="4095,0", softcap=50.0),
    "gemma3-12b": Preset("16/8", "256"),  # google/gemma-3-12b-pt: one layer of six
    "gemma3-12b-local": Preset("16/8", "256", window="1023,0"),
    "gpt-oss-20b": Preset("64/8", "64", sink=True),  # openai/gpt-oss-20b; the 120b has the same attention
    "gpt-oss-20b-local": Preset("64/8", "64", window="127,0", sink=True),
    # deepseek-ai/DeepSeek-V3: qk_nope_head_dim 128 + qk_rope_head_dim 64, v_head_dim 128; absorbed over the cache, kv_lora_rank 512 + 64.
    "deepseek-v3": Preset("128", "192-128", cached=("128/1", "576-512")),
    "vit-l": Preset("16", "64", causal="no", seqlen="197"),  # google/vit-large-patch16-224: 14 x 14 patches and a class token
    "dit-xl": Preset("16", "72", causal="no", seqlen="256"),  # facebook/DiT-XL-2-256: 32 x 32 latents in patches of 2
}


def use_preset(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Options that are not given take the preset's values."""
    if value is not None:
        command = ctx.info_name or ""
        known = {option.name for option in ctx.command.params}
        ctx.default_map = {name: x for name, x in PRESETS[value].options(command).items() if name in known}


preset_option = click.option(
    "--preset",
    type=click.Choice([*PRESETS]),
    callback=use_preset,
    expose_value=False,
    is_eager=True,
    metavar="NAME",
    help=f"The shapes of a model; options beside it overrule it. {', '.join(PRESETS)}.",
)
