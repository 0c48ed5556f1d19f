"""The live view: one browser component, the event stream that feeds it, and the view models it draws."""
