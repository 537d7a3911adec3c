"""PEFT adapters of swapped models."""
