"""The Experiments page behind the screen: charts, the form, saved results, running experiments."""
