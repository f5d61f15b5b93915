"""The agent of a run, which starts and watches the ranks, and starts them again; and what ranks need to take part."""
