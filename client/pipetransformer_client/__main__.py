"""`python -m pipetransformer_client` is the command `pipetransformer`."""

from .cli import main

if __name__ == "__main__":
    main()
