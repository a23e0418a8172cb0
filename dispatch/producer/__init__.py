"""The SDK that submits calls and hands their replies out."""
