"""Which tiles, in what order, of what size: answered without a GPU and without Triton."""
