"""The ``graphplat`` command. Needs the extra ``cli``."""
