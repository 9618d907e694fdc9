"""The subcommands of `ratchet`, one small module each; imported only when called, so that `--help` is instant."""
