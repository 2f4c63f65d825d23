"""`python -m torchstorm` is the `torchstorm` command."""

from torchstorm.cli import main

if __name__ == "__main__":  # else somebody only imports it
    main()
