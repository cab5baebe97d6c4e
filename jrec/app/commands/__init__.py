"""The subcommands of ``jrec``, one module each; ``jrec.cli`` lists them and says what a module offers."""
