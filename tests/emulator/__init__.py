"""Tests of the emulator; a package so that its conftest has a name of its own."""
