"""Train a small language model with NSA, and the same model with dense attention beside it.

    python examples/train_lm.py
    python examples/train_lm.py --text book.txt --steps 500

Both see the same windows of the text, and are compared on its end, which neither was trained on. What they save is
loaded again before it is used. A real run, with data, checkpoints and monitors, is `python -m nsa.train`; see
docs/training.md. `python examples/generate.py` lets a trained model write.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from nsa import NSAConfig
from nsa.model import DecoderLM, ModelConfig, next_token_loss

LENGTH, BATCH, LEARNING_RATE = 256, 2, 3e-3  # tokens of a window, windows of a step
CONFIG = ModelConfig(  # a text of 256 bytes has 8 blocks of 32, of which each query selects 4
    dim=64, n_layers=2, n_heads=4, num_kv_heads=2, d_k=16, d_v=16, nsa=NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=32)
)


def windows(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count, LENGTH], at random places of the text."""
    firsts = torch.randint(len(tokens) - LENGTH, (count,), generator=generator).tolist()
    return torch.stack([tokens[first : first + LENGTH] for first in firsts])


def train(config: ModelConfig, tokens: Tensor, steps: int) -> DecoderLM:
    torch.manual_seed(0)
    model = DecoderLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(1)  # the same windows for both models
    for step in range(steps):
        batch = windows(tokens, BATCH, generator)
        loss = next_token_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 0 or (step + 1) % 20 == 0:
            print(f"  step {step + 1:>4}: loss {loss.item():.3f} nats per byte")
    return model


def saved_and_loaded(model: DecoderLM) -> DecoderLM:
    """`weights_only` refuses a file that holds anything but tensors, so that loading runs no code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        torch.save(model.state_dict(), path)
        again = DecoderLM(model.config)
        again.load_state_dict(torch.load(path, weights_only=True))
    return again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="file to learn from (default: this one)")
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    tokens = torch.tensor(list(asked.text.read_bytes()))
    held_out = len(tokens) // 5
    if held_out <= LENGTH:
        parser.error(f"--text must hold more than {5 * LENGTH + 4} bytes; {asked.text} has {len(tokens)}")
    test = windows(tokens[-held_out:], 4, torch.Generator().manual_seed(2))

    losses = {}
    for name, config in (("nsa", CONFIG), ("dense", dataclasses.replace(CONFIG, attention="dense"))):
        print(f"{name}:")
        model = saved_and_loaded(train(config, tokens[:-held_out], asked.steps))
        with torch.no_grad():
            losses[name] = next_token_loss(model(test), test).item()
        print(f"  {model.num_parameters():,} parameters")
    print("loss on text that neither has seen, in nats per byte (8 random bits are 5.545):")
    print("  " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))


if __name__ == "__main__":
    main()
