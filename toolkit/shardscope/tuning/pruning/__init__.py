"""Pruners that stop poor trials, and successive halving that resumes the best trials from checkpoints."""
