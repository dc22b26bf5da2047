"""Cases and records in the formats of other benches, and back: flashinfer-bench's FlashInfer Trace (0.1.2)."""
