"""The pages: a Streamlit app, its live view, and the launcher that serves them."""
