"""Published memory of training runs beside predictions: peaks, runs that ran, and runs that ran out of memory."""
