"""Training: an autoregressive checkpoint made a diffusion model over chunks, and adapters for one that is.

Nothing here imports the engine; what is trained is what the engine runs: `models.Backbone` with another attention.
"""
