"""What stops trials that are not worth their remaining steps, and what lets the best go on from a checkpoint."""
