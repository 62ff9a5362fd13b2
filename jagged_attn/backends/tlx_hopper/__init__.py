"""TLX kernels for Hopper (sm_90): persistent, warp-specialised, fed by TMA."""
