"""Stand-in for IPython in the page: what ipywidgets and the widgets import of it, and no shell."""


def get_ipython() -> None:
    """Return None, because there is no shell."""
