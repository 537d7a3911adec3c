"""Time, memory and quality over length: which attention, from where on, at what price."""
