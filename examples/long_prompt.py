"""A long prompt in a paged cache: chunked prefill, two continuations that share it, and what a step reads.

    python examples/long_prompt.py
    python examples/long_prompt.py --tokens 65536

The prompt goes in chunk by chunk, so that memory beside the cache stays bounded. Its keys and values lie in pages; a
second continuation is a fork, which shares all pages and copies none. Each new token then costs one call, in which
dense attention would read every key of the prompt, and NSA reads a share that shrinks as the prompt grows.
"""

from __future__ import annotations

import argparse

import torch

from nsa import PagedCache
from nsa.model import SHOWCASE, DecoderLM

CHUNK = 1024


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (default: 8192)")
    parser.add_argument("--new-tokens", type=int, default=8)
    asked = parser.parse_args()
    if asked.tokens < 1:
        parser.error(f"--tokens must be at least 1; got {asked.tokens}")
    torch.manual_seed(0)
    model = DecoderLM(SHOWCASE)  # untrained: what it reads does not depend on what it has learnt
    prompt = torch.randint(model.config.vocab_size, (1, asked.tokens))

    layers = model.attentions()
    longest = asked.tokens + asked.new_tokens
    pages = PagedCache.pages(layers[0], longest, per_call=CHUNK)
    pages += PagedCache.pages(layers[0], longest)  # room for the second continuation, whatever it may not share
    cache = PagedCache(layers, num_pages=pages, max_tokens=longest)
    print(f"cache: {pages} pages, {PagedCache.bytes(layers, num_pages=pages) / 2**20:.1f} MiB")

    first = cache.new()
    for chunk in prompt.split(CHUNK, dim=1):
        logits = model(chunk, cache.rows([first]))
    free = cache.num_free_pages
    print(f"prefill: {cache.length(first)} tokens in chunks of {CHUNK}, {pages - free} pages in use")

    second = cache.fork(first)
    print(
        f"fork: {free - cache.num_free_pages} further pages for a second continuation of {cache.length(second)} tokens"
    )

    # the two draw other tokens, and go on as one batch
    generator = torch.Generator().manual_seed(0)
    rows = cache.rows([first, second], count_reads=True)
    tokens = torch.multinomial(logits[0, -1].softmax(-1), 2, generator=generator)[:, None]  # [2, 1]
    texts: tuple[list[int], list[int]] = ([], [])
    for _ in range(asked.new_tokens):
        for text, token in zip(texts, tokens[:, 0].tolist(), strict=True):
            text.append(token)
        logits = model(tokens, rows)  # [2, 1, vocab_size]
        tokens = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator)
    print(f"new tokens: {texts[0]} and {texts[1]}")

    aux = rows.layers[0].aux  # what the first layer did in the last step
    assert aux is not None
    read = {branch: int(keys) for branch, keys in aux.keys_read.items()}
    dense = 2 * model.config.num_kv_heads * cache.length(first)  # two rows
    for branch, keys in read.items():
        print(f"{branch:<10} {keys:>7,} keys read by the last step")
    print(f"together {sum(read.values()) / dense:.1%} of the {dense:,} that dense attention reads")

    cache.free(first)
    cache.free(second)
    print(f"after the end: {cache.num_free_pages} of {pages} pages are free")


if __name__ == "__main__":
    main()
