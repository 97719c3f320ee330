"""``python -m everstep``, also under torchrun: ``torchrun -m everstep train CONFIG``."""

from everstep.cli import main

if __name__ == "__main__":
    main()
