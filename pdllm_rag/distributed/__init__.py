"""Prefill on the workers of a Ray cluster; nothing here is imported unless it is asked for (docs/scale.md)."""
