"""Brings back the quality of a swapped model: attention transfer, distillation, fine-tuning."""
