"""Device helpers that the kernels of several backends share. Importing a module of this package imports Triton."""
