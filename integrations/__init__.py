"""All that knows transformers, accelerate or peft; importable only as ``attnzoo.integrations``."""

if __name__ != "attnzoo.integrations":  # under two names, every class would exist twice
    raise ImportError(
        f"this folder is the package attnzoo.integrations, but was imported as {__name__!r}; "
        "write `import attnzoo.integrations`"
    )
