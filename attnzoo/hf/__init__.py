"""All that knows transformers, accelerate or PEFT."""
