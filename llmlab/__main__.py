"""`python -m llmlab` is the command line."""

from llmlab.run.cli import main

main()
