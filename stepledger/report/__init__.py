"""What a comparison looks like: one module per format."""
