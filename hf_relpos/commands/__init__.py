"""One file a sub-command of `python -m hf_relpos`."""
