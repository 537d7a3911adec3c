"""Code for one kind of device: called by ops, imports nothing above itself."""
