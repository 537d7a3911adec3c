"""Code that the kernels of several mechanisms share; imports no other part of attnzoo but masks."""
