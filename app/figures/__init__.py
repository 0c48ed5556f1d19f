"""Pure functions from trace records to plain Plotly figure dicts and JSON view models. Nothing here knows Streamlit."""
