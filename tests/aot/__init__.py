"""Tests of the ahead-of-time gates; a package so that its conftest has a name of its own."""
