"""Small TLX kernels, written for the emulator's tests."""
