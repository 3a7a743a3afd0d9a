"""Benchmarks over the public API: each compares two things in one run and says what it ran on."""
