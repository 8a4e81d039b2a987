"""Evaluate a trained model."""
