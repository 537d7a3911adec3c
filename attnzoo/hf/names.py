"""The names that attnzoo adds to configs, models and caches of transformers and PEFT.

:mod:`attnzoo.hf.patches` reads them when neither package is imported, so this module imports
nothing.
"""

# The name of the attention implementation, of the config's field and of each layer's submodule
NAME = "attnzoo"
# What precedes the class names under "architectures", and "model_type", in the config.json of a
# saved swap. A loader without attnzoo goes by either, finds no such class or type, and refuses the
# model, instead of running softmax.
ARCHITECTURE_PREFIX = "Attnzoo"
TYPE_PREFIX = "attnzoo_"
IN_SWAPPED = "_attnzoo_in_swapped"  # of a submodel with its own spec in a model swapped as a whole
PRUNED = "attnzoo_pruned_heads"  # attribute of a config: heads that a model has lost, by layer
LOADED = "_attnzoo_loaded"  # attribute of an adapter's config that was read from a file
