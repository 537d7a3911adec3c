"""Quality recovery of swapped models: plans, attention transfer, distillation, fine-tuning."""
