"""Train the small model on a text for a few seconds, then let it write: `python examples/generate.py --help`.

Training: random windows of the text, next-byte loss. Writing: the prompt goes in at once (prefill), then each new token
costs one call of the model on that token alone; keys and values of all others lie in a paged cache, of which a step
reads the compressed ones, n selected blocks and a window, and not the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from nsa.generate import generate, with_progress
from nsa.model import SHOWCASE, DecoderLM, next_token_loss
from nsa.sampling import Sampling

BATCH, LENGTH, LEARNING_RATE = 4, 256, 3e-3


def trained(text: bytes, steps: int, seed: int) -> DecoderLM:
    """A small model of these bytes."""
    torch.manual_seed(seed)
    model, tokens = DecoderLM(SHOWCASE), torch.tensor(list(text))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, steps + 1):
        firsts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([tokens[first : first + LENGTH] for first in firsts])
        loss = next_token_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == steps:
            print(f"training: step {step} of {steps}, loss {loss.item():.3f} nats per byte", file=sys.stderr)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--text", type=Path, default=Path(__file__), help="file to learn from (default: this one)")
    parser.add_argument("--train-steps", type=int, default=100)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--rows", type=int, default=1, help="continuations; one is printed as it comes")
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    text = asked.text.read_bytes()
    if len(text) <= LENGTH:
        parser.error(f"--text must hold more than {LENGTH} bytes; {asked.text} has {len(text)}")
    try:
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
        model = trained(text, asked.train_steps, asked.seed)
        prompts = [asked.prompt.encode()] * asked.rows
        steps = generate(model, prompts, max_new_tokens=asked.max_new_tokens, sampling=sampling)
    except ValueError as error:
        parser.error(str(error))
    if asked.rows == 1:
        print(asked.prompt, end="", flush=True)
        together = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())  # a terminal, or `2>&1`
        for step in with_progress(steps, asked.max_new_tokens, only_last=together):
            sys.stdout.buffer.write(bytes(token for token in step if token is not None))
            sys.stdout.flush()
        if not together:
            print()
        return
    found = list(with_progress(steps, asked.max_new_tokens))
    for row in range(asked.rows):
        new = bytes(token for step in found if (token := step[row]) is not None)
        print(f"--- {row}\n{asked.prompt}{new.decode(errors='replace')}")


if __name__ == "__main__":
    main()
