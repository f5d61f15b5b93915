"""Stand-in for `IPython.core.interactiveshell`."""


class InteractiveShell:
    """A shell that does not exist; ipywidgets imports the name."""
