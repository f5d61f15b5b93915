"""What a job, or a layout, is predicted to send, to hold and to take."""
