"""The texts that training reads: question blocks over passages, drawn from a corpus by a recipe.

- `Corpus.read` loads rows and prose once; it never changes afterwards;
- `Mixture(corpus, recipe).sample(rng)` is a function of the corpus, the recipe and the generator's state alone, so that
  training goes on exactly where it stopped.
"""

from pdllm_rag.training.texts.corpus import Corpus
from pdllm_rag.training.texts.mixture import Mixture
from pdllm_rag.training.texts.recipe import Recipe
from pdllm_rag.training.texts.sample import Exchange, Sample

__all__ = ["Corpus", "Exchange", "Mixture", "Recipe", "Sample"]
