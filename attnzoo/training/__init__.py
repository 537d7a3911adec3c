"""Quality recovery of swapped models: plans, attention transfer, distillation, fine-tuning.

The names that the stub lists are for training loops of your own (docs/training_loop.md). They are
imported on first use.
"""

from attnzoo.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
