"""Swap the attention of a Hugging Face model: a dense Llama becomes an NSA model, and goes on as one.

    python examples/swap_attention_hf.py

The Llama here is tiny and random, so that nothing is downloaded; take a folder of your own instead. Weights are kept.
What NSA adds, its gates and the compression of keys, is new, and starts so that the model is close to what it was.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import nsa

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    import nsa.integrations.transformers as nsa_hf
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, **sizes, **heads))


def main() -> None:
    text = torch.tensor([list(Path(__file__).read_bytes()[:256])])  # [1, 256]: bytes are the tokens
    with tempfile.TemporaryDirectory() as folder:
        dense, sparse = Path(folder, "dense"), Path(folder, "sparse")
        tiny_llama().save_pretrained(dense)
        print(nsa_hf.convert(dense, sparse, nsa.NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=64)))

        # from here on it is a model of transformers like any other
        before = AutoModelForCausalLM.from_pretrained(dense)
        model = AutoModelForCausalLM.from_pretrained(sparse)
    print(f"{type(before).__name__} -> {type(model).__name__}")

    with torch.no_grad():
        apart = (model(text).logits - before(text).logits).abs().max()
    print(f"logits differ by at most {apart:.3f} before any training")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = model(text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"five steps of training: loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    new = model.generate(text[:, :32], max_new_tokens=8, do_sample=False)
    print(f"generated: {new[0, 32:].tolist()}")


if __name__ == "__main__":
    main()
