"""Pruners that stop poor trials, and successive halving, which resumes the best trials from checkpoints."""
